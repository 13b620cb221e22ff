"""Makes the helper modules in this folder importable from the tests in its subfolders.

pytest puts the folder of each conftest.py it finds on the path.
"""
