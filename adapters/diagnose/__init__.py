"""From an error text and a folder to the cause: symptoms people see, rules that look for it, commands that mend it."""
