"""Early exits: a head after every layer, and the policy by which a sample leaves."""
