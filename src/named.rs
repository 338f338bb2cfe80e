//! Enums whose variants have names, and numbers that other ranks, callers or files know.

/// Defines an enum from a table of its variants.
#[macro_export]
macro_rules! named {
    ($(#[$of:meta])* $name:ident: $($(#[$doc:meta])* $variant:ident = $number:literal, $text:literal;)+) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum $name { $($(#[$doc])* $variant = $number),+ }

        impl $name {
            /// All variants, by number.
            pub const ALL: [Self; [$($number),+].len()] = [$(Self::$variant),+];

            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|it| it.name() == name)
            }

            pub const fn from_raw(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                to.write_str(self.name())
            }
        }
    };
}
