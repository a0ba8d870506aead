"""Many conversations to tokens: what those of one shape have in common is rendered and encoded once.

template       what a chat template writes around texts that it cannot see
cutting        where a conversation can be cut, so that its parts have the tokens of the whole
layout         the tokens around the texts of conversations of one shape
conversations  the tokens of many conversations
"""
