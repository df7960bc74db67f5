#include "foundation.hpp"

#include <cstring>

#include "config.hpp"

namespace metalsim::objc {

String* new_string(const std::string& text) {
    auto* s = make<String>("NSString");
    s->text = text;
    return s;
}

std::string text_of(const Object* string) { return string ? static_cast<const String*>(string)->text : ""; }

Error* new_error(const char* domain, long code, const std::string& description) {
    auto* e = make<Error>("NSError");
    e->domain = new_string(domain);
    e->code = code;
    e->description = new_string(description);
    return e;
}

void give_error(Error** out, const char* domain, long code, const std::string& description) {
    if (out) *out = autoreleased(new_error(domain, code, description));
}

Array* new_array(std::vector<Object*> items) {
    auto* a = make<Array>("NSArray");
    a->items = std::move(items);
    return a;
}

namespace {

struct Version {
    long major, minor, patch;
};

// A key's text: dictionaries of the host have strings as keys.
std::string key_of(Object* key) { return text_of(key); }

void declare_strings() {
    const char* S = "NSString";
    declare_class<String>(S);
    class_method(S, "string", [](objc_class*, SEL) { return autoreleased(new_string("")); });
    class_method(S, "stringWithCString:encoding:", [](objc_class*, SEL, const char* c, unsigned long) {
        return autoreleased(new_string(c));
    });
    class_method(S, "stringWithString:", [](objc_class*, SEL, Object* s) {
        return autoreleased(new_string(text_of(s)));
    });
    method(S, "initWithString:", [](String* s, SEL, Object* other) {
        s->text = text_of(other);
        return s;
    });
    method(S, "initWithCString:encoding:", [](String* s, SEL, const char* c, unsigned long) {
        s->text = c;
        return s;
    });
    method(S, "initWithBytesNoCopy:length:encoding:freeWhenDone:",
           [](String* s, SEL, const char* c, unsigned long n, unsigned long, bool free_when_done) {
               s->text.assign(c, n);
               if (free_when_done) free(const_cast<char*>(c));
               return s;
           });
    method(S, "UTF8String", [](String* s, SEL) { return s->text.c_str(); });
    method(S, "cStringUsingEncoding:", [](String* s, SEL, unsigned long) { return s->text.c_str(); });
    method(S, "length", [](String* s, SEL) { return static_cast<unsigned long>(s->text.size()); });
    method(S, "lengthOfBytesUsingEncoding:", [](String* s, SEL, unsigned long) {
        return static_cast<unsigned long>(s->text.size());
    });
    method(S, "isEqualToString:", [](String* s, SEL, Object* other) { return s->text == text_of(other); });
    method(S, "description", [](String* s, SEL) { return s; });
    method(S, "stringByAppendingString:", [](String* s, SEL, Object* other) {
        return autoreleased(new_string(s->text + text_of(other)));
    });
}

void declare_containers() {
    const char* A = "NSArray";
    declare_class<Array>(A);
    class_method(A, "array", [](objc_class*, SEL) { return autoreleased(new_array({})); });
    class_method(A, "arrayWithObject:", [](objc_class*, SEL, Object* o) {
        return autoreleased(new_array({retain(o)}));
    });
    class_method(A, "arrayWithObjects:count:", [](objc_class*, SEL, Object* const* items, unsigned long n) {
        std::vector<Object*> list(items, items + n);
        for (Object* o : list) retain(o);
        return autoreleased(new_array(std::move(list)));
    });
    method(A, "count", [](Array* a, SEL) { return static_cast<unsigned long>(a->items.size()); });
    method(A, "objectAtIndex:", [](Array* a, SEL, unsigned long i) {
        if (i >= a->items.size()) misuse("NSArray index " + std::to_string(i) + " is beyond the array");
        return a->items[i];
    });

    const char* D = "NSDictionary";
    declare_class<Dictionary>(D);
    class_method(D, "dictionary",
                 [](objc_class*, SEL) { return autoreleased(make<Dictionary>("NSDictionary")); });
    class_method(D, "dictionaryWithObject:forKey:", [](objc_class*, SEL, Object* value, Object* key) {
        auto* d = make<Dictionary>("NSDictionary");
        d->entries[key_of(key)] = retain(value);
        return autoreleased(d);
    });
    class_method(D, "dictionaryWithObjects:forKeys:count:",
                 [](objc_class*, SEL, Object* const* values, Object* const* keys, unsigned long n) {
                     auto* d = make<Dictionary>("NSDictionary");
                     for (unsigned long i = 0; i < n; i++) d->entries[key_of(keys[i])] = retain(values[i]);
                     return autoreleased(d);
                 });
    method(D, "count", [](Dictionary* d, SEL) { return static_cast<unsigned long>(d->entries.size()); });
    method(D, "objectForKey:", [](Dictionary* d, SEL, Object* key) -> Object* {
        auto found = d->entries.find(key_of(key));
        return found == d->entries.end() ? nullptr : found->second;
    });

    const char* N = "NSNumber";
    declare_class<Number>(N);
    class_method(N, "numberWithInt:", [](objc_class*, SEL, int v) {
        auto* n = make<Number>("NSNumber");
        n->value = v;
        return autoreleased(n);
    });
    method(N, "intValue", [](Number* n, SEL) { return static_cast<int>(n->value); });
}

}  // namespace

void declare_foundation() {
    declare_strings();
    declare_containers();

    const char* E = "NSError";
    declare_class<Error>(E);
    method(E, "code", [](Error* e, SEL) { return e->code; });
    method(E, "domain", [](Error* e, SEL) { return e->domain; });
    method(E, "localizedDescription", [](Error* e, SEL) { return e->description; });
    method(E, "localizedFailureReason", [](Error* e, SEL) { return e->description; });
    method(E, "description", [](Error* e, SEL) { return e->description; });
    method(E, "userInfo", [](Error*, SEL) -> Object* { return nullptr; });

    const char* P = "NSProcessInfo";
    declare_class<Object>(P);
    class_method(P, "processInfo", [](objc_class*, SEL) {
        static Object* instance = make<Object>("NSProcessInfo");
        return instance;
    });
    method(P, "operatingSystemVersion",
           [](Object*, SEL) { return Version{config().macos_major, config().macos_minor, 0}; });
    method(P, "isOperatingSystemAtLeastVersion:", [](Object*, SEL, Version v) {
        long major = config().macos_major, minor = config().macos_minor;
        return major > v.major || (major == v.major && minor >= v.minor);
    });
    method(P, "operatingSystemVersionString", [](Object*, SEL) {
        return autoreleased(new_string("Version " + std::to_string(config().macos_major) + "." +
                                       std::to_string(config().macos_minor) + " (simulated)"));
    });
    method(P, "physicalMemory", [](Object*, SEL) { return config().working_set.load() / 2 * 3; });
}

}  // namespace metalsim::objc

extern "C" __attribute__((visibility("default"))) const void* __CFStringMakeConstantString(const char* text) {
    return metalsim::objc::new_string(text);
}
