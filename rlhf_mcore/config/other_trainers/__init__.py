"""Tables of the keys of other trainers: what each is called here, and why where it has no counterpart."""
