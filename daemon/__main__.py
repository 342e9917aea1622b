"""Run the command line as ``python -m fusewire.daemon``."""

from .cli import main

main()
