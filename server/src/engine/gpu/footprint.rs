//! Device memory that an image takes, for its client's memory limit: the loaded sections of a cubin, including those
//! without content in the file, and the variables declared by a PTX text.

use crate::engine::gpu::cubin::{Budget, KIND_CUBIN, KIND_TEXT, entries};
use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection, SectionFlags};

/// Bytes that an image takes on a device of a compute capability (`10 * major + minor`), or the maximum if the driver
/// chooses among several; `None` if it cannot be determined.
pub fn footprint(image: &[u8], arch: u32) -> Option<u64> {
    if image.starts_with(b"\x7fELF") {
        return of_cubin(image);
    }
    let entries = entries(image)?;
    if entries.is_empty() {
        return of_text(image);
    }
    let runs = |kind: u16, of: u32| kind == KIND_CUBIN && of / 10 == arch / 10 && of <= arch;
    let compiled = !entries.iter().any(|entry| runs(entry.kind, entry.arch));
    let (mut most, mut budget) = (0, Budget::of_code(image));
    for entry in &entries {
        let bytes = match compiled {
            true if entry.kind == KIND_TEXT => of_text(&entry.content(&mut budget)?)?,
            false if runs(entry.kind, entry.arch) => of_cubin(&entry.content(&mut budget)?)?,
            _ => 0,
        };
        most = most.max(bytes);
    }
    Some(most)
}

/// Bytes of all loaded sections.
fn of_cubin(bytes: &[u8]) -> Option<u64> {
    let file = ElfFile64::<Endianness>::parse(bytes).ok()?;
    let mut sum = 0u64;
    for section in file.sections() {
        if let SectionFlags::Elf { sh_flags } = section.flags()
            && sh_flags & u64::from(object::elf::SHF_ALLOC) != 0
        {
            sum = sum.checked_add(section.size())?;
        }
    }
    Some(sum)
}

/// Bytes of all variables that a text declares in global memory.
fn of_text(bytes: &[u8]) -> Option<u64> {
    let text = without_comments(bytes);
    let mut sum = 0u64;
    for declaration in declarations(&text, b".global") {
        sum = sum.checked_add(of_declaration(declaration?)?)?;
    }
    Some(sum)
}

/// For each declaration of variables in a state space, the text after the space's name up to the semicolon; `None` for
/// an unterminated one. The text must have no comments.
pub fn declarations<'a>(text: &'a [u8], space: &'a [u8]) -> impl Iterator<Item = Option<&'a [u8]>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        loop {
            let begin = at + memchr::memmem::find(&text[at..], space)?;
            let behind = begin + space.len();
            at = behind;
            // After a dot it is part of an instruction; after `.ptr` it qualifies a parameter's address space.
            let before = &text[..begin];
            let ends = |byte: &u8| byte.is_ascii_whitespace() || matches!(byte, b';' | b'{' | b'}');
            if before.last().is_some_and(|byte| !ends(byte))
                || before.trim_ascii_end().ends_with(b".ptr")
            {
                continue;
            }
            let Some(len) = memchr::memchr(b';', &text[behind..]) else {
                at = text.len();
                return Some(None);
            };
            at = behind + len;
            return Some(Some(&text[behind..at]));
        }
    })
}

/// The text with each comment replaced by a space.
pub fn without_comments(bytes: &[u8]) -> Vec<u8> {
    let (mut text, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let len = if rest.starts_with(b"//") {
            memchr::memchr(b'\n', rest).unwrap_or(rest.len())
        } else if rest.starts_with(b"/*") {
            memchr::memmem::find(&rest[2..], b"*/").map_or(rest.len(), |end| end + 4)
        } else {
            text.push(bytes[at]);
            at += 1;
            continue;
        };
        text.push(b' ');
        at += len;
    }
    text
}

/// Bytes declared by the text between `.global` and the semicolon: attributes, a type, names with dimensions and
/// initializers.
pub fn of_declaration(words: &[u8]) -> Option<u64> {
    let words = std::str::from_utf8(words).ok()?;
    let (mut width, mut vector, mut sum) = (None, 1, 0u64);
    for (n, variable) in at_top(words, ',').into_iter().enumerate() {
        let (declared, content) = match variable.split_once('=') {
            Some((declared, content)) => (declared, Some(content)),
            None => (variable, None),
        };
        let dimensions = declared.find('[').unwrap_or(declared.len());
        let (head, dimensions) = declared.split_at(dimensions);
        if n == 0 {
            for word in head.split_ascii_whitespace() {
                match word {
                    ".v2" => vector = 2,
                    ".v4" => vector = 4,
                    _ => width = width.or(width_of(word)),
                }
            }
        }
        let mut bytes = u64::checked_mul(width?, vector)?;
        for (n, dimension) in dimensions.split('[').skip(1).enumerate() {
            let inside = dimension.trim_end().strip_suffix(']')?.trim();
            let count = match (inside, content) {
                // As many elements as the initializer has.
                ("", Some(content)) if n == 0 => at_top_of_braces(content)?,
                _ => number(inside)?,
            };
            bytes = bytes.checked_mul(count)?;
        }
        sum = sum.checked_add(bytes)?;
    }
    Some(sum)
}

/// Splits text at separators outside of braces, brackets and parentheses.
pub fn at_top(text: &str, separator: char) -> Vec<&str> {
    let mut depth = 0;
    text.split(|letter| {
        match letter {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            _ => {}
        }
        letter == separator && depth == 0
    })
    .collect()
}

/// Number of elements of an initializer.
fn at_top_of_braces(content: &str) -> Option<u64> {
    let inside = content.trim().strip_prefix('{')?.strip_suffix('}')?;
    Some(at_top(inside, ',').len() as u64)
}

/// Size of a type, bytes.
fn width_of(word: &str) -> Option<u64> {
    let bits = match word {
        ".pred" => 8,
        // Handles, which take a 64-bit word.
        ".texref" | ".samplerref" | ".surfref" => 64,
        _ => {
            let digits = word
                .strip_prefix('.')?
                .strip_prefix(['b', 'u', 's', 'f', 'e'])?;
            let digits = digits.split_once('x').map_or(digits, |(digits, _)| digits);
            digits.trim_start_matches('f').parse::<u64>().ok()?
        }
    };
    (8..=1024).contains(&bits).then_some(bits.div_ceil(8))
}

/// Parses a number in PTX syntax.
fn number(word: &str) -> Option<u64> {
    let word = word.trim_end_matches('U');
    let (digits, radix) = match word.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&word[2..], 16),
        [b'0', b'b' | b'B', ..] => (&word[2..], 2),
        [b'0', _, ..] => (&word[1..], 8),
        _ => (word, 10),
    };
    let plain = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    plain.then(|| u64::from_str_radix(digits, radix).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(declaration: &str) -> Option<u64> {
        let code = ".visible .entry k(.param .u64 .ptr .global .align 4 p)\n{ ld.global.u32 %r1, [%rd1]; ret; }\n\0";
        footprint(
            format!(".version 7.0\n{declaration}\n{code}").as_bytes(),
            90,
        )
    }

    #[test]
    fn variables_of_texts_are_counted() {
        for (declaration, bytes) in [
            ("", 0),
            (".global .u32 a;", 4),
            (".visible .global .align 8 .f64 a;", 8),
            (".global .align 4 .b8 big[536870912];", 512 << 20),
            (".global .b8 big[0x20000000];", 512 << 20),
            (".global .v4 .f32 table[0b11][010U];", 3 * 8 * 16),
            (".global .b32 a, b[3], c = 5;", 20),
            (".global .u16 a[] = {1, 2, 3};", 6),
            (
                ".global .b8 a[4] = {1, 2};\t.global .u64 p[2] = {a, generic(a)};",
                20,
            ),
            (
                "// .global .b8 a[9];\n/* .global\n.b8 */ .global/* ; */.b8 /**/ a[ 7 ];",
                7,
            ),
            (".global .f16x2 a;", 2),
        ] {
            assert_eq!(text(declaration), Some(bytes), "{declaration}");
        }
    }

    #[test]
    fn what_is_not_understood_is_not_called_small() {
        for declaration in [
            ".global .b8 a[1 << 20];",
            ".global .b8 a[4 * 1024];",
            ".global .strange a;",
            ".global .b8 a[18446744073709551615][2];",
            ".global .b8 a[18446744073709551616];",
        ] {
            assert_eq!(text(declaration), None, "{declaration}");
        }
        assert_eq!(footprint(b".global .b8 a[4]", 90), None);
        assert_eq!(footprint(b"\x7fELF but none", 90), None);
    }

    #[test]
    fn a_long_text_takes_no_long_time() {
        // A quadratic search would take minutes.
        let many = " .global".repeat(1 << 17);
        assert_eq!(footprint(many.as_bytes(), 90), None);
        let many = ".global .u32 a;".repeat(1 << 16);
        assert_eq!(footprint(many.as_bytes(), 90), Some(4 << 16));
    }

    #[test]
    fn loaded_sections_of_a_file_are_counted() {
        let own = std::fs::read(std::env::current_exe().expect("a path")).expect("a file");
        let bytes = footprint(&own, 90).expect("an ELF file");
        let file = ElfFile64::<Endianness>::parse(&own[..]).expect("an ELF file");
        let bss = file.section_by_name(".bss").expect(".bss").size();
        let text = file.section_by_name(".text").expect(".text").size();
        assert!(bss > 0 && bytes >= bss + text && bytes < own.len() as u64 + bss + (1 << 20));
    }
}
