"""Scripts for people who work on Bitwright; not part of the installed package."""
