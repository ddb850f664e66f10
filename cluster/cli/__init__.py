"""The command line: `ropewalk serve | status | replay | graph | demo`."""
