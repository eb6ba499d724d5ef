"""The command lines: a command turns flags into a checked job and makes one call into the library."""
