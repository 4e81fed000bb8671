"""(spec, schedule) to source text, or a reason why not. One package per back end; they do not know each other."""
