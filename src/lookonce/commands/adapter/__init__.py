"""The commands `lookonce adapter ...`.

group    the group
check    whether another program takes a run's adapter
merge    an adapter added to its model's weights
push     an adapter, or a merged model, on the Hub
embeds   cached features for vLLM
"""
