"""Agents: programs that ask the policy over HTTP for as many turns as they want, and end with a reward.

Enters: a task, for each episode. Leaves: a trajectory with the tokens of all turns. Read driver.py first: it is to an engine what
episodes.py is for an environment. tree.py holds what was said, conversation.py finds a request's place in it, endpoint.py serves.
"""
