#include "library.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>

#include "config.hpp"
#include "diagnostics.hpp"

extern char** environ;

namespace metalsim {

namespace {

std::mutex load_mutex;
Library* loading = nullptr;  // while dlopen runs its constructors

struct Loaded {
    std::map<std::string, std::unique_ptr<Library>> by_path;
    std::map<std::vector<std::string>, Library*> by_source;  // settings and text
};
Loaded& loaded() {
    static Loaded* instance = new Loaded;
    return *instance;
}

// Runs a program and waits; returns its exit code, -1 if it could not be started.
int run(const std::vector<std::string>& command, const std::string& output) {
    std::vector<char*> arguments;
    for (const std::string& a : command) arguments.push_back(const_cast<char*>(a.c_str()));
    arguments.push_back(nullptr);
    std::string path = "PYTHONPATH=" + tools_directory();
    std::vector<char*> environment{const_cast<char*>(path.c_str())};
    for (char** e = environ; *e; e++)
        if (strncmp(*e, "PYTHONPATH=", 11)) environment.push_back(*e);
    environment.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t child = 0;
    int failed = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environment.data());
    posix_spawn_file_actions_destroy(&actions);
    if (failed) return -1;
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
}

// A directory that is removed with its known files.
class Scratch {
  public:
    Scratch() {
        const char* tmp = getenv("TMPDIR");
        std::string pattern = std::string(tmp && *tmp ? tmp : "/tmp") + "/metalsim-XXXXXX";
        if (mkdtemp(pattern.data())) path_ = pattern;
    }
    ~Scratch() {
        for (const char* name : {"/program_source", "/output"}) unlink((path_ + name).c_str());
        if (!path_.empty()) rmdir(path_.c_str());
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    const std::string& path() const { return path_; }

  private:
    std::string path_;
};

}  // namespace

const KernelInfo* Library::find(const std::string& name) const {
    for (const KernelInfo& k : kernels)
        if (name == k.name) return &k;
    return nullptr;
}

const FunctionConstant* Library::constant(const std::string& name) const {
    for (const FunctionConstant* c : constants)
        if (name == c->name) return c;
    return nullptr;
}

void register_kernel(const KernelInfo& info) {
    if (loading) loading->kernels.push_back(info);
}

FunctionConstant::FunctionConstant(int i, const char* n, void* s, uint32_t bytes)
    : index(i), name(n), storage(s), size(bytes) {
    if (loading) loading->constants.push_back(this);
}

Library* open_library(const std::string& path, std::string& error) {
    std::lock_guard lock(load_mutex);
    auto& entry = loaded().by_path[path];
    if (entry) return entry.get();
    auto library = std::make_unique<Library>();
    library->path = path;
    loading = library.get();
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    loading = nullptr;
    if (!handle) {
        error = dlerror();
        loaded().by_path.erase(path);
        return nullptr;
    }
    entry = std::move(library);
    return entry.get();
}

Library* compile_library(const std::string& source, const CompileOptions& options, std::string& error) {
    std::vector<std::string> settings{"--language", options.language,
                                      config().checks ? "--checked" : "--fast"};
    for (const std::string& macro : options.macros) settings.insert(settings.end(), {"-D", macro});
    std::vector<std::string> key = settings;
    key.push_back(source);
    {
        std::lock_guard lock(load_mutex);
        auto known = loaded().by_source.find(key);
        if (known != loaded().by_source.end()) return known->second;
    }
    Scratch scratch;
    std::string input = scratch.path() + "/program_source", output = scratch.path() + "/output";
    std::ofstream(input, std::ios::binary) << source;
    std::vector<std::string> command{python_executable(), "-m", "metalsim", "compile", input};
    command.insert(command.end(), settings.begin(), settings.end());
    int code = run(command, output);
    std::string text = read_file(output);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    if (code != 0) {
        for (size_t at; (at = text.find(scratch.path() + "/")) != std::string::npos;)
            text.erase(at, scratch.path().size() + 1);
        error = code < 0 ? "cannot run " + python_executable() : text;
        return nullptr;
    }
    Library* library = open_library(text.substr(text.rfind('\n') + 1), error);
    std::lock_guard lock(load_mutex);
    if (library) loaded().by_source[key] = library;
    return library;
}

uint32_t static_threadgroup_memory(const KernelInfo& kernel) {
    uint32_t total = 0;
    for (const ThreadgroupSlot* s = *kernel.slots; s; s = s->next) total = ((total + 15) & ~15u) + s->size;
    return total;
}

void apply_constants(const Pipeline& pipeline) {
    for (FunctionConstant* c : pipeline.library->constants) {
        c->defined = false;
        memset(c->storage, 0, c->size);
        for (const ConstantValue& given : pipeline.constants) {
            if (given.index != c->index) continue;
            if (given.value.size() != c->size) {
                report("function-constant", std::string(c->name) + " has " + std::to_string(c->size) +
                                                " bytes, the host gave " +
                                                std::to_string(given.value.size()));
                continue;
            }
            memcpy(c->storage, given.value.data(), c->size);
            c->defined = true;
        }
    }
}

}  // namespace metalsim
