"""How a running hicached is asked about itself and told what to do: the verbs, their messages, and a client."""
