#include "line_table.hpp"

#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

namespace metalsim {

namespace {

struct Row {
    uint64_t address;
    uint32_t file, line;
    bool end;
};

// A cursor over a section; reading past the end yields zeros.
class Cursor {
  public:
    Cursor(const char* begin, const char* end) : at_(begin), end_(end) {}
    template <class T>
    T read() {
        T value{};
        if (size_t(end_ - at_) >= sizeof(T)) memcpy(&value, at_, sizeof(T));
        at_ = std::min(at_ + sizeof(T), end_);
        return value;
    }
    uint64_t unsigned_leb() {
        uint64_t value = 0;
        for (int shift = 0; at_ < end_; shift += 7) {
            uint8_t byte = uint8_t(*at_++);
            if (shift < 64) value |= uint64_t(byte & 0x7F) << shift;
            if (!(byte & 0x80)) break;
        }
        return value;
    }
    int64_t signed_leb() {
        int64_t value = 0;
        int shift = 0;
        uint8_t byte = 0;
        do {
            byte = read<uint8_t>();
            if (shift < 64) value |= int64_t(byte & 0x7F) << shift;
            shift += 7;
        } while ((byte & 0x80) && at_ < end_);
        if (shift < 64 && (byte & 0x40)) value |= -(int64_t(1) << shift);
        return value;
    }
    std::string text() {
        const char* stop = std::find(at_, end_, '\0');
        std::string s(at_, stop);
        at_ = std::min(stop + 1, end_);
        return s;
    }
    void skip(uint64_t n) { at_ = uint64_t(end_ - at_) < n ? end_ : at_ + n; }
    const char* at() const { return at_; }
    bool done() const { return at_ >= end_; }

  private:
    const char *at_, *end_;
};

// One line-number program (DWARF 4, section 6.2).
class Program {
  public:
    Program(Cursor c, const char* end) : end_(end) {
        uint16_t version = c.read<uint16_t>();
        uint32_t header_length = c.read<uint32_t>();
        Cursor body(c.at() + header_length, end);
        minimum_length_ = c.read<uint8_t>();
        c.read<uint8_t>();  // operations per instruction
        c.read<uint8_t>();  // default is_stmt
        line_base_ = c.read<int8_t>();
        line_range_ = std::max<uint8_t>(c.read<uint8_t>(), 1);
        opcode_base_ = c.read<uint8_t>();
        for (int i = 1; i < opcode_base_; i++) lengths_.push_back(c.read<uint8_t>());
        if (version != 4) return;
        while (!c.text().empty()) {
        }
        files.push_back("");
        for (std::string name = c.text(); !name.empty(); name = c.text()) {
            files.push_back(name);
            c.unsigned_leb(), c.unsigned_leb(), c.unsigned_leb();
        }
        run(body);
    }
    std::vector<std::string> files;
    std::vector<Row> rows;

  private:
    void advance(uint64_t operations) { state_.address += operations * minimum_length_; }
    void emit() { rows.push_back(state_); }

    void run(Cursor c) {
        state_ = {0, 1, 1, false};
        while (!c.done()) {
            uint8_t opcode = c.read<uint8_t>();
            if (opcode >= opcode_base_) {
                unsigned adjusted = opcode - opcode_base_;
                advance(adjusted / line_range_);
                state_.line = uint32_t(int64_t(state_.line) + line_base_ + int(adjusted % line_range_));
                emit();
            } else if (opcode == 0) {
                extended(c);
            } else {
                standard(opcode, c);
            }
        }
    }

    void extended(Cursor& c) {
        uint64_t length = c.unsigned_leb();
        const char* begin = c.at();
        uint8_t opcode = c.read<uint8_t>();
        if (opcode == 1) {  // end_sequence
            state_.end = true;
            emit();
            state_ = {0, 1, 1, false};
        } else if (opcode == 2) {  // set_address
            state_.address = c.read<uint64_t>();
        }
        c.skip(uint64_t(begin + length - c.at()));
    }

    void standard(uint8_t opcode, Cursor& c) {
        switch (opcode) {
            case 1:
                emit();
                break;
            case 2:
                advance(c.unsigned_leb());
                break;
            case 3:
                state_.line = uint32_t(int64_t(state_.line) + c.signed_leb());
                break;
            case 4:
                state_.file = uint32_t(c.unsigned_leb());
                break;
            case 8:
                advance((255 - opcode_base_) / line_range_);
                break;
            case 9:
                state_.address += c.read<uint16_t>();
                break;
            default:
                for (int i = 0; i < lengths_[opcode - 1]; i++) c.unsigned_leb();
        }
    }

    const char* end_;
    Row state_{};
    uint8_t minimum_length_ = 1, line_range_ = 1, opcode_base_ = 1;
    int8_t line_base_ = 0;
    std::vector<uint8_t> lengths_;
};

class LineTable {
  public:
    explicit LineTable(const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        std::string image(std::istreambuf_iterator<char>(file), {});
        std::string section = debug_line(image);
        Cursor c(section.data(), section.data() + section.size());
        while (!c.done()) {
            uint32_t length = c.read<uint32_t>();
            const char* end =
                c.at() + std::min<size_t>(length, size_t(section.data() + section.size() - c.at()));
            programs_.emplace_back(Cursor(c.at(), end), end);
            c.skip(length);
        }
    }
    std::string find(uint64_t address) const {
        for (const Program& p : programs_)
            for (size_t i = 0; i + 1 < p.rows.size(); i++)
                if (!p.rows[i].end && p.rows[i].address <= address && address < p.rows[i + 1].address) {
                    size_t at = i;
                    while (at > 0 && !is_source(p, p.rows[at]) && !p.rows[at - 1].end) at--;
                    if (!is_source(p, p.rows[at])) return "";
                    std::string name = p.files[p.rows[at].file];
                    return name.substr(name.rfind('/') + 1) + ":" + std::to_string(p.rows[at].line);
                }
        return "";
    }

  private:
    // Code of the compiler's own (line 0) and of the shim headers belongs to the kernel line before it.
    static bool is_source(const Program& p, const Row& row) {
        if (row.line == 0 || row.file >= p.files.size()) return false;
        const std::string& name = p.files[row.file];
        return name.size() < 4 || name.compare(name.size() - 4, 4, ".hpp") != 0;
    }
    static std::string debug_line(const std::string& image) {
        if (image.size() < sizeof(Elf64_Ehdr)) return "";
        Elf64_Ehdr header;
        memcpy(&header, image.data(), sizeof header);
        auto section = [&](unsigned i) {
            Elf64_Shdr s{};
            size_t at = header.e_shoff + size_t(i) * header.e_shentsize;
            if (at + sizeof s <= image.size()) memcpy(&s, image.data() + at, sizeof s);
            return s;
        };
        Elf64_Shdr names = section(header.e_shstrndx);
        for (unsigned i = 0; i < header.e_shnum; i++) {
            Elf64_Shdr s = section(i);
            size_t at = names.sh_offset + s.sh_name;
            if (at < image.size() && !strcmp(image.c_str() + at, ".debug_line") &&
                s.sh_offset + s.sh_size <= image.size())
                return image.substr(s.sh_offset, s.sh_size);
        }
        return "";
    }
    std::vector<Program> programs_;
};

}  // namespace

std::string source_line(const void* return_address) {
    Dl_info info;
    if (!return_address || !dladdr(return_address, &info) || !info.dli_fname) return "";
    static auto* tables = new std::map<std::string, std::unique_ptr<LineTable>>;
    auto& table = (*tables)[info.dli_fname];
    if (!table) table = std::make_unique<LineTable>(info.dli_fname);
    return table->find(uint64_t((const char*)return_address - (const char*)info.dli_fbase) - 1);
}

}  // namespace metalsim
