"""Codecs: numbers to row bytes and back. They know no peers and no routing."""
