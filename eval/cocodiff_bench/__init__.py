"""The kinds of `cocodiff bench`, one module each; `common` has what they share."""
