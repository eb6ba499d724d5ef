"""The command lines: one file a command, which turns flags into a checked job and makes one call into the library."""
