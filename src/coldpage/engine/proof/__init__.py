"""``coldpage verify``: what came back from colder levels, against what never left hot memory."""
