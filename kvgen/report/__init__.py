"""`kvgen report`: a page about registered entries, how fast they are where, and how they were found."""
