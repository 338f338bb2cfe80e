// Reading and tokenising the text of moe_layer; see text.h.

#include "programs/moe_layer/text.h"

#include <unistd.h>

#include <cctype>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace moe {
namespace {

constexpr char kTextInRepository[] = "c_tests/programs/moe_layer/data/loomings.txt";

bool IsWordCharacter(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '\'';
}

uint64_t HashOfSpelling(const std::string& spelling) {
    uint64_t hash = 0xCBF29CE484222325ull;
    for (char c : spelling) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
    return hash;
}

}  // namespace

std::string DefaultTextPath() {
    char executable[4096];
    const ssize_t length = readlink("/proc/self/exe", executable, sizeof(executable) - 1);
    if (length > 0) {
        const std::string path(executable, static_cast<size_t>(length));
        const std::string directory = path.substr(0, path.rfind('/'));
        const std::string candidate = directory + "/../../../" + kTextInRepository;
        char resolved[PATH_MAX];
        if (realpath(candidate.c_str(), resolved) != nullptr) return resolved;
    }
    return kTextInRepository;
}

std::string ReadTextFile(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    content << file.rdbuf();
    return content.str();
}

std::vector<uint64_t> Tokenise(const std::string& text) {
    std::vector<uint64_t> tokens;
    std::string word;
    const auto end_word = [&] {
        if (!word.empty()) tokens.push_back(HashOfSpelling(word));
        word.clear();
    };
    for (char c : text) {
        if (IsWordCharacter(c)) {
            word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
            continue;
        }
        end_word();
        if (std::ispunct(static_cast<unsigned char>(c)) != 0) {
            tokens.push_back(HashOfSpelling(std::string(1, c)));
        }
    }
    end_word();
    return tokens;
}

}  // namespace moe
