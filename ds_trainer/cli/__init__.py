"""The commands: one file each turns flags into a job, tells all mistakes of it, and makes one call. Loads no torch."""
