"""Several hosts: the hostfile, and the doctor that checks the hosts of one before a run."""
