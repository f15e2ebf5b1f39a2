//! The addresses that the list of members gives to clients.

use super::{Settings, Urls};

impl Settings {
    /// Returns the advertised URLs whose host means all addresses: a client of the list of members connects to its own
    /// machine with them.
    ///
    /// Returns none if no address was set, so that the server listens at `default_listen_urls`: the image has such a default,
    /// because it does not know how clients reach its container.
    pub(super) fn unspecified_urls(&self, default_listen_urls: &Urls) -> Vec<String> {
        let urls = match self.advertise_client_urls.0.as_slice() {
            [] if self.listen_client_urls == *default_listen_urls => return Vec::new(),
            [] => self.listen_client_urls.0.as_slice(),
            urls => urls,
        };
        urls.iter().filter(|url| url.is_unspecified()).map(ToString::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_that_lead_clients_to_their_own_machine_are_found() {
        let urls = |text: &str| text.parse::<Urls>().expect("valid URLs");
        let image = urls("http://0.0.0.0:2379");
        for (listen, advertised, expected) in [
            ("https://0.0.0.0:2379", "", &["https://0.0.0.0:2379"][..]),
            ("https://127.0.0.1:1,https://[::]:2,unix:///x", "", &["https://[::]:2"]),
            ("http://:2379", "", &["http://:2379"]),
            ("https://0.0.0.0:2379", "https://db.example:2379", &[]),
            ("https://127.0.0.1:2379", "https://0.0.0.0:2379", &["https://0.0.0.0:2379"]),
            ("http://127.0.0.1:2379", "", &[]),
            // Nothing is set in the image.
            ("http://0.0.0.0:2379", "", &[]),
            ("http://0.0.0.0:2379", "http://0.0.0.0:2379", &["http://0.0.0.0:2379"]),
        ] {
            let (listen_client_urls, advertise_client_urls) = (urls(listen), urls(advertised));
            let settings = Settings { listen_client_urls, advertise_client_urls, ..Settings::default() };
            assert_eq!(settings.unspecified_urls(&image), expected, "{listen} {advertised}");
        }
    }
}
