"""Agents, which are programs that request turns of the policy over HTTP, as many as they want, and end with a reward.

The input is a task for each episode. The output is a trajectory with the tokens of all turns. Read episode.py first: it does for
agents what environment.py does for environments. tree.py stores the turns of an episode, conversation.py finds the place of a request
in the tree, and endpoint.py is the HTTP server.
"""
