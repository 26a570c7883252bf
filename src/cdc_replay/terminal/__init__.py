"""What a person sees of the command line: screens, tables, progress, questions."""
