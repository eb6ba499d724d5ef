"""What a run is: its phases one after another, the only training loop, and what resumes and scores them."""
