"""One outside thing a file, each behind a Protocol of ports.py."""
