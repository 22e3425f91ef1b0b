"""The drawings of the documentation, made from what the algorithms do on simulated ranks.

python -m docs.drawings            say which drawings are out of date
python -m docs.drawings --write    bring them up to date
"""
