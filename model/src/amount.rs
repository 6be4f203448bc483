//! Amounts of memory as an operator writes and reads them: `3G`, `512MB`; a number alone is MiB, as with NVIDIA's
//! daemon.

/// Suffixes and their factors, the largest first.
const UNITS: &[(char, u64)] = &[
    ('T', 1 << 40),
    ('G', 1 << 30),
    ('M', 1 << 20),
    ('K', 1 << 10),
];

/// Not an amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not an amount of memory: a whole number over 0 with B, K, M, G or T, or of MiB"
)]
pub struct NoAmount(String);

/// Bytes.
///
/// # Errors
/// Anything but a whole number above 0 with an optional unit, and amounts of more than 64 bits.
pub fn parse(text: &str) -> Result<u64, NoAmount> {
    mpsshim_proto::limits::bytes(text).ok_or_else(|| NoAmount(text.to_owned()))
}

/// Prints bytes in the largest unit without a remainder.
pub fn print(bytes: u64) -> String {
    let unit = UNITS
        .iter()
        .find(|(_, size)| bytes > 0 && bytes.is_multiple_of(*size));
    match unit {
        Some((name, size)) => format!("{}{name}", bytes / size),
        None => format!("{bytes}B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_and_printed() {
        for (text, bytes, printed) in [
            ("3G", 3 << 30, "3G"),
            ("512MB", 512 << 20, "512M"),
            ("1024m", 1 << 30, "1G"),
            ("1536M", 1536 << 20, "1536M"),
            ("7k", 7 << 10, "7K"),
            ("2tb", 2 << 40, "2T"),
            ("100", 100 << 20, "100M"),
            ("2048", 2 << 30, "2G"),
            ("4096B", 4096, "4K"),
            ("1000b", 1000, "1000B"),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
            assert_eq!(print(bytes), printed);
            assert_eq!(parse(printed), Ok(bytes));
        }
        assert_eq!(print(0), "0B");
    }

    #[test]
    fn what_is_no_amount() {
        for text in [
            "",
            "G",
            "0",
            "0G",
            "-1G",
            "+1G",
            "1.5G",
            "1 G",
            "1GG",
            "1GiB",
            "x",
            "1e3",
            "99999999999999999999",
            "18446744073709551615",
            "１G",
        ] {
            assert_eq!(parse(text), Err(NoAmount(text.into())), "{text}");
        }
    }
}
