"""The APIs, one folder each: bodies to requests, answers to bodies, and the routes."""
