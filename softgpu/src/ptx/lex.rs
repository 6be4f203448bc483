//! Tokens of PTX, with their line numbers.

use super::PtxError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token<'a> {
    /// A name, a dotted mnemonic, a directive or a number: everything made of letters, digits and `._$%`.
    Word(&'a str),
    Text(&'a str),
    Mark(char),
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

/// Splits `text` into tokens; comments and the line-bound directives `.loc` and `.file` are dropped.
pub fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, PtxError> {
    let bytes = text.as_bytes();
    let (mut at, mut line) = (0, 1);
    let mut out = Vec::with_capacity(bytes.len() / 4);
    while at < bytes.len() {
        let rest = &bytes[at..];
        match rest[0] {
            b'\n' => {
                line += 1;
                at += 1;
            }
            b' ' | b'\t' | b'\r' => at += 1,
            b'/' if rest.starts_with(b"//") => {
                at += rest.iter().position(|&c| c == b'\n').unwrap_or(rest.len());
            }
            b'/' if rest.starts_with(b"/*") => {
                let Some(end) = text[at..].find("*/") else {
                    return Err(PtxError {
                        line,
                        reason: "comment without end".into(),
                    });
                };
                line += rest[..end].iter().filter(|&&c| c == b'\n').count() as u32;
                at += end + 2;
            }
            b'"' => {
                let Some(end) = rest[1..].iter().position(|&c| c == b'"' || c == b'\n') else {
                    return Err(PtxError {
                        line,
                        reason: "string without end".into(),
                    });
                };
                out.push((Token::Text(&text[at + 1..at + 1 + end]), line));
                at += end + 2;
            }
            c if is_word(c) => {
                let mut end = 0;
                // `::` joins the parts of a modifier such as `.L1::no_allocate`.
                while end < rest.len() && (is_word(rest[end]) || rest[end..].starts_with(b"::")) {
                    end += if rest[end] == b':' { 2 } else { 1 };
                }
                let word = &text[at..at + end];
                at += end;
                if matches!(word, ".loc" | ".file") {
                    at += bytes[at..]
                        .iter()
                        .position(|&c| c == b'\n')
                        .unwrap_or(bytes.len() - at);
                } else {
                    out.push((Token::Word(word), line));
                }
            }
            c if c.is_ascii_punctuation() => {
                out.push((Token::Mark(c as char), line));
                at += 1;
            }
            c => {
                return Err(PtxError {
                    line,
                    reason: format!("byte {c:#04x} in the text"),
                });
            }
        }
    }
    Ok(out)
}

/// The value of an integer literal: decimal, hexadecimal, octal or binary, with an optional `U`.
pub fn integer(word: &str) -> Option<u64> {
    let word = word.strip_suffix(['U', 'u']).unwrap_or(word);
    let lower = word.to_ascii_lowercase();
    if let Some(hex) = lower.strip_prefix("0x") {
        u64::from_str_radix(hex, 16).ok()
    } else if let Some(binary) = lower.strip_prefix("0b") {
        u64::from_str_radix(binary, 2).ok()
    } else if lower.len() > 1 && lower.starts_with('0') {
        u64::from_str_radix(&lower[1..], 8).ok()
    } else {
        word.parse().ok()
    }
}

/// The value of a floating-point literal: `0f` and `0d` give the bits, otherwise a decimal with a dot.
pub fn float(word: &str) -> Option<f64> {
    let lower = word.to_ascii_lowercase();
    if let Some(hex) = lower.strip_prefix("0f") {
        return Some(f64::from(f32::from_bits(
            u32::from_str_radix(hex, 16).ok()?,
        )));
    }
    if let Some(hex) = lower.strip_prefix("0d") {
        return Some(f64::from_bits(u64::from_str_radix(hex, 16).ok()?));
    }
    if word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.') {
        word.parse().ok()
    } else {
        None
    }
}
