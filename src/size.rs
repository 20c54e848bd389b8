//! Bytes as people write them (`4G`, `512MiB`) and as they like to read them (`1.2G`). Units are powers of 1024.

const UNITS: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// Reads a whole number of bytes with an optional unit: K, M, G, T or KiB, MiB, GiB, TiB, in either case.
///
/// KB, MB and the like are refused: to some they are powers of 1000, to others of 1024.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    let shift = unit_shift(unit).ok_or_else(|| WANTED.to_string())?;
    let count: u64 = digits.parse().map_err(|_| WANTED.to_string())?;
    count
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("more bytes than 64 bits can count; {WANTED}"))
}

const WANTED: &str = "a size is a whole number of bytes, or one with a unit of K, M, G, T or KiB, MiB, GiB, TiB \
                      (powers of 1024), such as 512M";

fn unit_shift(unit: &str) -> Option<u32> {
    if unit.is_empty() {
        return Some(0);
    }
    let unit = unit.to_ascii_uppercase();
    UNITS
        .iter()
        .find(|(letter, _)| unit == letter.to_string() || unit == format!("{letter}IB"))
        .map(|&(_, shift)| shift)
}

/// At most five characters and one unit letter, as `zramctl` writes: `4G`, `1.2G`, `512M`, `0B`. Rounded to the nearest.
pub fn human(bytes: u64) -> String {
    let mut text = format!("{bytes}B");
    for (letter, shift) in UNITS {
        // In tenths, so that rounding can be seen to carry over: 1023.96M is 1G and not 1024M.
        let tenths = (u128::from(bytes) * 10 + (1 << (shift - 1))) >> shift;
        if tenths < 10 {
            break;
        }
        text = match (tenths / 10, tenths % 10) {
            (whole, _) if whole >= 100 => format!("{}{letter}", (u128::from(bytes) + (1 << (shift - 1))) >> shift),
            (whole, 0) => format!("{whole}{letter}"),
            (whole, tenth) => format!("{whole}.{tenth}{letter}"),
        };
    }
    text
}

/// As [`human`], with the unit in full for running text: `1.2 GiB`.
pub fn human_long(bytes: u64) -> String {
    let text = human(bytes);
    let (number, letter) = text.split_at(text.len() - 1);
    match letter {
        "B" => format!("{number} bytes"),
        letter => format!("{number} {letter}iB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1k", 1024),
            ("512M", 512 << 20),
            ("4G", 4 << 30),
            ("4GiB", 4 << 30),
            ("4gib", 4 << 30),
            ("2T", 2 << 40),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "",
            "G",
            "-1",
            "1.5G",
            "1GB",
            "1X",
            "1 G",
            "1Gi",
            "99999999T",
            "18446744073709551616",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn human_sizes_stay_short_at_every_edge() {
        for (bytes, text) in [
            (0, "0B"),
            (972, "972B"),
            (973, "1K"), // 0.95 rounds up
            (4096, "4K"),
            (1536, "1.5K"),
            (100 << 10, "100K"),
            ((1 << 20) - 1, "1M"),
            (1 << 20, "1M"),
            ((100 << 30) - 1, "100G"),
            (16 << 40, "16T"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
        for shift in 0..44 {
            for bytes in [(1u64 << shift) - 1, 1 << shift, (1 << shift) + 1, (1 << shift) * 3 / 2] {
                assert!(human(bytes).len() <= 5, "{bytes} is {}", human(bytes));
            }
        }
    }
}
