"""Saved states: how they are declared, checked, compared between ranks, stored and resharded."""
