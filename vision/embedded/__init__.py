"""The eyes of the embedded model: their pictures, training and evaluation. Tools, run by hand; nothing that serves
imports them."""
