"""The words of ``edlrun``'s command line, read, completed and checked as a whole."""
