"""`tiercache replay --plan`: how much host memory and disk save how much on a source.

Reading order: `curve` (savings by size, and their knee), `search` (which sizes are run), `answer` (sentences
and figures), `picture` (the drawing and the page).
"""
