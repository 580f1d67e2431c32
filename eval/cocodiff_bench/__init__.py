"""The kinds of `cocodiff bench`, a module each; `common` is what they share."""
