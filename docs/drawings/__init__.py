"""The drawings of the documentation, from traces of simulated ranks and from recorded results.

python -m docs.drawings            say which drawings are out of date
python -m docs.drawings --write    bring them up to date
"""
