// Assertions of the test programs: each prints one line, `ok` or `FAIL`, which pytest reads.
#pragma once
#include <cstdio>
#include <functional>
#include <string>

inline void check(bool good, const std::string& what) {
    printf("%s %s\n", good ? "ok" : "FAIL", what.c_str());
}

// The error text of a call that must throw, "" if it did not.
inline std::string error_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const std::exception& e) {
        return e.what();
    }
    return "";
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}
