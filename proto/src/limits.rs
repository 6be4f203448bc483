//! How limits of device memory are written: `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` and the commands of the control daemon.

/// Parses an amount such as `3G`, `512MB` or `2048K` into bytes. A bare number counts megabytes, as in NVIDIA's MPS.
pub fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let shift = match unit.to_ascii_uppercase().as_str() {
        "B" => 0,
        "K" | "KB" => 10,
        "" | "M" | "MB" => 20,
        "G" | "GB" => 30,
        "T" | "TB" => 40,
        _ => return None,
    };
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0)
}

/// Parses a list of limits such as `0=1G,1=512MB` into device names and bytes. `Err` holds an entry that is not a
/// limit.
pub fn of_devices(text: &str) -> impl Iterator<Item = Result<(&str, u64), &str>> {
    let parts = text.split(',').map(str::trim);
    parts.filter(|part| !part.is_empty()).map(|part| {
        let (device, amount) = part.split_once('=').ok_or(part)?;
        Ok((device.trim(), bytes(amount).ok_or(part)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts() {
        for (text, expected) in [
            ("3G", Some(3 << 30)),
            ("512mb", Some(512 << 20)),
            (" 2048K ", Some(2 << 20)),
            ("100", Some(100 << 20)),
            ("1TB", Some(1 << 40)),
            ("4096B", Some(4096)),
            ("0G", None),
            ("-1G", None),
            ("1.5G", None),
            ("", None),
            ("G", None),
            ("5X", None),
            ("99999999999999999999G", None),
            ("18446744073709551615G", None),
        ] {
            assert_eq!(bytes(text), expected, "{text}");
        }
    }

    #[test]
    fn lists() {
        let read: Vec<_> = of_devices("0=1G, GPU-12=512MB,,2=x,3").collect();
        assert_eq!(
            read,
            [
                Ok(("0", 1 << 30)),
                Ok(("GPU-12", 512 << 20)),
                Err("2=x"),
                Err("3")
            ]
        );
    }
}
