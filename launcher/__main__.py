"""``python -m warmslot.launcher`` is the command line ``warmslot``."""

from .cli import main

main()
