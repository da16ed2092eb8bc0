"""One module per kind of source; each answers with every host it has, or raises, and never guesses."""
