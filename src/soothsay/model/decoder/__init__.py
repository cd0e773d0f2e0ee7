"""The layers of a decoder, and what they are made of. Their passes call operations of `ops` alone."""
