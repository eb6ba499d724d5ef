"""Token classification: tags of words, such as named entities."""
