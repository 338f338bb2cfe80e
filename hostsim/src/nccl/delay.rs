//! Random delays, which expose mistakes in the order of operations.
//!
//! Without them the ranks of one machine run nearly in step, and a program that relies on that works. With
//! `NCCLEP_HOSTSIM_DELAY_US` every operation begins and ends late by a random time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Keeps delays far below the time after which a rank counts as missing.
const LONGEST: Duration = Duration::from_secs(1);
const DEFAULT_SEED: u64 = 1;
/// Steps of the generator: 2^64 divided by the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// What the environment asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    longest: Duration,
    seed: u64,
}

/// The delays of one rank's end of a communicator.
pub(crate) struct Delays {
    longest: Duration,
    state: AtomicU64,
}

impl Delays {
    /// A separate sequence for each rank, and for each of a process's communicators.
    pub(crate) fn of_rank(rank: usize) -> Self {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        static MADE: AtomicU64 = AtomicU64::new(0);
        let settings = SETTINGS.get_or_init(|| {
            let read = |name| std::env::var(name).ok();
            parse(read("NCCLEP_HOSTSIM_DELAY_US").as_deref(), read("NCCLEP_HOSTSIM_DELAY_SEED").as_deref())
        });
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let place = (number << 32) | rank as u64;
        Self { longest: settings.longest, state: AtomicU64::new(mix(settings.seed ^ mix(place))) }
    }

    /// The next delay; zero if none are wanted.
    pub(crate) fn draw(&self) -> Duration {
        if self.longest.is_zero() {
            return Duration::ZERO;
        }
        let random = mix(self.state.fetch_add(STEP, Ordering::Relaxed));
        let limit = self.longest.as_micros() as u64 + 1;
        Duration::from_micros(random % limit)
    }

    /// Sleeps for the next delay.
    pub(crate) fn sleep(&self) {
        let delay = self.draw();
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
    }
}

fn parse(micros: Option<&str>, seed: Option<&str>) -> Settings {
    let number = |text: Option<&str>| text.and_then(|text| text.trim().parse().ok());
    Settings {
        longest: Duration::from_micros(number(micros).unwrap_or(0)).min(LONGEST),
        seed: number(seed).unwrap_or(DEFAULT_SEED),
    }
}

/// Spreads the bits of a counter (the finaliser of splitmix64).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(STEP);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays(micros: u64, seed: u64) -> Vec<u128> {
        let delays = Delays { longest: Duration::from_micros(micros), state: AtomicU64::new(seed) };
        (0..1000).map(|_| delays.draw().as_micros()).collect()
    }

    #[test]
    fn delays_fill_their_range_and_follow_the_seed() {
        assert!(delays(0, 3).iter().all(|delay| *delay == 0));
        let drawn = delays(300, 3);
        assert!(drawn.iter().all(|delay| *delay <= 300));
        assert!(drawn.iter().any(|delay| *delay < 10));
        assert!(drawn.iter().any(|delay| *delay > 290));
        assert_eq!(drawn, delays(300, 3));
        assert_ne!(drawn, delays(300, 4));
    }

    #[test]
    fn settings_are_numbers_within_limits() {
        let settings = |longest, seed| Settings { longest: Duration::from_micros(longest), seed };
        assert_eq!(parse(None, None), settings(0, DEFAULT_SEED));
        assert_eq!(parse(Some("300"), Some("9")), settings(300, 9));
        assert_eq!(parse(Some("-1"), Some("x")), settings(0, DEFAULT_SEED));
        assert_eq!(parse(Some("9999999999"), None), settings(1_000_000, 1));
    }
}
