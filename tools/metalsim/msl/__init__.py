"""The Metal Shading Language front end: rewrites MSL kernels so that clang compiles them as C++.

`lexer` splits preprocessed text into tokens, `rewriter` finds kernels, threadgroup variables and
function constants and erases what plain C++ has no word for, `emit` writes the execution or the check
dialect, `reflection` describes the kernels as JSON, `static_check` compiles the check dialect and lints it.
"""
