"""The demo: a real daemon and two real engine processes, driven through everything that a cache has to survive."""
