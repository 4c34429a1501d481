"""Where documents come from; ``opening.open_source`` gives the documents of any source."""
