// The Foundation classes that Metal hands out or takes.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "object.hpp"

namespace metalsim::objc {

struct String : Object {
    std::string text;
};
struct Number : Object {
    double value = 0;
};
struct Array : Object {
    std::vector<Object*> items;
    void finish() {
        for (Object* o : items) release(o);
    }
};
struct Dictionary : Object {
    std::map<std::string, Object*> entries;
    void finish() {
        for (auto& [key, o] : entries) release(o);
    }
};
struct Error : Object {
    String *domain = nullptr, *description = nullptr;
    long code = 0;
    void finish() {
        release(domain);
        release(description);
    }
};

struct Range {
    unsigned long location, length;
};

String* new_string(const std::string& text);
std::string text_of(const Object* string);  // "" for nil
Error* new_error(const char* domain, long code, const std::string& description);
// Stores an autoreleased error where the host asked for one.
void give_error(Error** out, const char* domain, long code, const std::string& description);
// Takes over the items' references.
Array* new_array(std::vector<Object*> items);

}  // namespace metalsim::objc
