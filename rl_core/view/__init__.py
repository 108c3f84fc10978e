"""`rljob view`: a page over the files of one or several runs, served on this machine."""
