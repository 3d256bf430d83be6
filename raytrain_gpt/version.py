"""Version of this package, without its imports: for files that it writes, and for the build."""

VERSION = "0.1.0"
