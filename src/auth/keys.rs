//! JSON Web Tokens: signed and verified with every sign method that etcd accepts. The cryptography is that of ring, and
//! of p521 for ES512, which ring lacks.

use std::fmt::Display;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as BASE64};
use p521::{
    ecdsa::signature::{Signer as _, Verifier as _},
    pkcs8::DecodePrivateKey as _,
};
use ring::{
    hmac,
    rand::SystemRandom,
    signature::{
        self, ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED,
        ECDSA_P384_SHA384_FIXED_SIGNING, ED25519, EcdsaKeyPair, EcdsaSigningAlgorithm, Ed25519KeyPair, KeyPair as _,
        RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RSA_PKCS1_SHA256,
        RSA_PKCS1_SHA384, RSA_PKCS1_SHA512, RSA_PSS_2048_8192_SHA256, RSA_PSS_2048_8192_SHA384,
        RSA_PSS_2048_8192_SHA512, RSA_PSS_SHA256, RSA_PSS_SHA384, RSA_PSS_SHA512, RsaEncoding, RsaKeyPair,
        UnparsedPublicKey, VerificationAlgorithm,
    },
};
use sec1::EcPrivateKey;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, SubjectPublicKeyInfoDer, pem::PemObject as _};
use x509_parser::prelude::{FromDer as _, SubjectPublicKeyInfo};

use crate::api::status::VERIFY_ONLY_KEY;

/// A method of signing tokens.
#[derive(Clone, Copy)]
pub struct SignMethod {
    /// Its name in the header of a token.
    name: &'static str,
    algorithm: Algorithm,
}

#[derive(Clone, Copy)]
enum Algorithm {
    Hmac(hmac::Algorithm),
    Rsa(&'static dyn RsaEncoding, &'static dyn VerificationAlgorithm),
    Ecdsa(&'static EcdsaSigningAlgorithm, &'static dyn VerificationAlgorithm),
    P521,
    Ed25519,
}

const METHODS: [(&str, Algorithm); 13] = [
    ("HS256", Algorithm::Hmac(hmac::HMAC_SHA256)),
    ("HS384", Algorithm::Hmac(hmac::HMAC_SHA384)),
    ("HS512", Algorithm::Hmac(hmac::HMAC_SHA512)),
    ("RS256", Algorithm::Rsa(&RSA_PKCS1_SHA256, &RSA_PKCS1_2048_8192_SHA256)),
    ("RS384", Algorithm::Rsa(&RSA_PKCS1_SHA384, &RSA_PKCS1_2048_8192_SHA384)),
    ("RS512", Algorithm::Rsa(&RSA_PKCS1_SHA512, &RSA_PKCS1_2048_8192_SHA512)),
    ("PS256", Algorithm::Rsa(&RSA_PSS_SHA256, &RSA_PSS_2048_8192_SHA256)),
    ("PS384", Algorithm::Rsa(&RSA_PSS_SHA384, &RSA_PSS_2048_8192_SHA384)),
    ("PS512", Algorithm::Rsa(&RSA_PSS_SHA512, &RSA_PSS_2048_8192_SHA512)),
    ("ES256", Algorithm::Ecdsa(&ECDSA_P256_SHA256_FIXED_SIGNING, &ECDSA_P256_SHA256_FIXED)),
    ("ES384", Algorithm::Ecdsa(&ECDSA_P384_SHA384_FIXED_SIGNING, &ECDSA_P384_SHA384_FIXED)),
    ("ES512", Algorithm::P521),
    ("EdDSA", Algorithm::Ed25519),
];

impl SignMethod {
    /// The method of simple tokens.
    const HS256: Self = Self { name: METHODS[0].0, algorithm: METHODS[0].1 };

    /// # Errors
    ///
    /// A text with the accepted names.
    pub fn of_name(name: &str) -> Result<Self, String> {
        let found = METHODS.into_iter().find(|(known, _)| *known == name);
        found
            .map(|(name, algorithm)| Self { name, algorithm })
            .ok_or_else(|| format!("sign-method {name:?} is not one of {}", METHODS.map(|(name, _)| name).join(", ")))
    }
}

/// The keys of one sign method.
pub struct Keys {
    method: &'static str,
    /// `None`: only the public key is known.
    signing: Option<SigningKey>,
    verifying: VerifyingKey,
}

enum SigningKey {
    Hmac(hmac::Key),
    Rsa(Box<RsaKeyPair>, &'static dyn RsaEncoding),
    Ecdsa(Box<EcdsaKeyPair>),
    P521(Box<p521::ecdsa::SigningKey>),
    Ed25519(Box<Ed25519KeyPair>),
}

enum VerifyingKey {
    Hmac(hmac::Key),
    Ring(UnparsedPublicKey<Vec<u8>>),
    P521(Box<p521::ecdsa::VerifyingKey>),
}

/// The header of a token. Other fields do not matter: the method is the configured one.
#[derive(Deserialize)]
struct Header {
    alg: String,
}

impl Keys {
    /// Returns the keys of simple tokens.
    pub fn of_secret(secret: &[u8]) -> Result<Self, String> {
        Self::new(SignMethod::HS256, None, Some(secret))
    }

    /// Returns the keys in the contents of the two files: PEM, or the shared key itself for HS256, HS384 and HS512. The
    /// public key can also be in a certificate.
    ///
    /// # Errors
    ///
    /// A text for the operator: a key is missing or cannot be used, or the two do not belong together.
    pub fn new(method: SignMethod, public: Option<&[u8]>, private: Option<&[u8]>) -> Result<Self, String> {
        let SignMethod { name: method, algorithm } = method;
        if let Algorithm::Hmac(algorithm) = algorithm {
            let missing = "priv-key is missing: a file with the shared key";
            let key = hmac::Key::new(algorithm, private.filter(|key| !key.is_empty()).ok_or(missing)?);
            return Ok(Self {
                method,
                signing: Some(SigningKey::Hmac(key.clone())),
                verifying: VerifyingKey::Hmac(key),
            });
        }
        let signing = private.map(|pem| SigningKey::of_pem(algorithm, pem)).transpose();
        let signing = signing.map_err(unusable("priv-key"))?;
        let public = public.map(public_key).transpose().map_err(unusable("pub-key"))?;
        let public = match (public, signing.as_ref().map(SigningKey::public)) {
            (Some(public), Some(of_private)) if public != of_private => {
                return Err("pub-key and priv-key do not belong together".to_owned());
            }
            (_, Some(public)) | (Some(public), None) => public,
            (None, None) => {
                return Err("pub-key and priv-key are missing: at least one PEM file is required".to_owned());
            }
        };
        let verifying = match algorithm {
            Algorithm::Rsa(_, algorithm) | Algorithm::Ecdsa(_, algorithm) => {
                VerifyingKey::Ring(UnparsedPublicKey::new(algorithm, public))
            }
            Algorithm::Ed25519 | Algorithm::Hmac(_) => VerifyingKey::Ring(UnparsedPublicKey::new(&ED25519, public)),
            Algorithm::P521 => {
                let key = p521::ecdsa::VerifyingKey::from_sec1_bytes(&public).map_err(unusable("pub-key"))?;
                VerifyingKey::P521(Box::new(key))
            }
        };
        let keys = Self { method, signing, verifying };
        keys.check_public_key(algorithm)?;
        Ok(keys)
    }

    /// Checks that a public key is one of the method: ring parses it only when it is used.
    fn check_public_key(&self, algorithm: Algorithm) -> Result<(), String> {
        let VerifyingKey::Ring(key) = &self.verifying else { return Ok(()) };
        let bytes = key.as_ref();
        let is_key = match algorithm {
            // A SEQUENCE of two numbers, of at least 2,048 bits together.
            Algorithm::Rsa(..) => bytes.first() == Some(&0x30) && bytes.len() > 256,
            Algorithm::Ecdsa(..) => {
                // An uncompressed point of two numbers, whose length is that of a signature.
                let len = if self.method == "ES256" { 64 } else { 96 };
                bytes.first() == Some(&4) && bytes.len() == len + 1
            }
            Algorithm::Ed25519 => bytes.len() == signature::ED25519_PUBLIC_KEY_LEN,
            Algorithm::Hmac(_) | Algorithm::P521 => true,
        };
        if is_key { Ok(()) } else { Err(unusable("pub-key")("it is another kind of key, or too short")) }
    }

    /// Returns a token with these claims.
    ///
    /// # Errors
    ///
    /// If only a public key is known; the text is etcd's.
    pub(super) fn sign(&self, claims: &impl Serialize) -> Result<String, String> {
        let signing = self.signing.as_ref().ok_or(VERIFY_ONLY_KEY)?;
        let header = format!(r#"{{"alg":"{}","typ":"JWT"}}"#, self.method);
        let claims = serde_json::to_vec(claims).map_err(|error| error.to_string())?;
        let signed = format!("{}.{}", BASE64.encode(header), BASE64.encode(claims));
        let signature = signing.sign(signed.as_bytes())?;
        Ok(format!("{signed}.{}", BASE64.encode(signature)))
    }

    /// Returns the claims of a token that was signed with these keys by this method. The claims are not checked.
    pub(super) fn verify<C: DeserializeOwned>(&self, token: &str) -> Option<C> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, claims) = signed.split_once('.')?;
        let header: Header = serde_json::from_slice(&BASE64.decode(header).ok()?).ok()?;
        let is_valid =
            header.alg == self.method && self.verifying.verifies(signed.as_bytes(), &BASE64.decode(signature).ok()?);
        if !is_valid {
            return None;
        }
        serde_json::from_slice(&BASE64.decode(claims).ok()?).ok()
    }
}

impl SigningKey {
    /// Parses a private key in PKCS #8, or in the older form of its kind.
    fn of_pem(algorithm: Algorithm, pem: &[u8]) -> Result<Self, String> {
        let key = PrivateKeyDer::from_pem_slice(pem).map_err(text)?;
        let der = key.secret_der();
        let is_sec1 = matches!(key, PrivateKeyDer::Sec1(_));
        Ok(match algorithm {
            Algorithm::Rsa(encoding, _) => {
                let pkcs1 = matches!(key, PrivateKeyDer::Pkcs1(_));
                let pair = if pkcs1 { RsaKeyPair::from_der(der) } else { RsaKeyPair::from_pkcs8(der) };
                Self::Rsa(Box::new(pair.map_err(text)?), encoding)
            }
            Algorithm::Ecdsa(algorithm, _) if is_sec1 => {
                let parsed = EcPrivateKey::try_from(der).map_err(text)?;
                let public = parsed.public_key.ok_or("the key lacks its public part")?;
                let random = SystemRandom::new();
                let pair =
                    EcdsaKeyPair::from_private_key_and_public_key(algorithm, parsed.private_key, public, &random);
                Self::Ecdsa(Box::new(pair.map_err(text)?))
            }
            Algorithm::Ecdsa(algorithm, _) => {
                let pair = EcdsaKeyPair::from_pkcs8(algorithm, der, &SystemRandom::new());
                Self::Ecdsa(Box::new(pair.map_err(text)?))
            }
            Algorithm::P521 => {
                let key = if is_sec1 {
                    p521::SecretKey::from_sec1_der(der).map_err(text)?
                } else {
                    p521::SecretKey::from_pkcs8_der(der).map_err(text)?
                };
                let key = p521::ecdsa::SigningKey::from_bytes(&key.to_bytes()).map_err(text)?;
                Self::P521(Box::new(key))
            }
            Algorithm::Ed25519 | Algorithm::Hmac(_) => {
                let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der).map_err(text)?;
                Self::Ed25519(Box::new(pair))
            }
        })
    }

    /// Returns the public key as [`public_key`] does.
    fn public(&self) -> Vec<u8> {
        match self {
            Self::Rsa(pair, _) => pair.public_key().as_ref().to_vec(),
            Self::Ecdsa(pair) => pair.public_key().as_ref().to_vec(),
            Self::Ed25519(pair) => pair.public_key().as_ref().to_vec(),
            Self::P521(key) => p521::ecdsa::VerifyingKey::from(&**key).to_encoded_point(false).as_bytes().to_vec(),
            Self::Hmac(_) => Vec::new(),
        }
    }

    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, String> {
        let random = SystemRandom::new();
        Ok(match self {
            Self::Hmac(key) => hmac::sign(key, message).as_ref().to_vec(),
            Self::Rsa(pair, encoding) => {
                let mut signature = vec![0; pair.public().modulus_len()];
                pair.sign(*encoding, &random, message, &mut signature).map_err(text)?;
                signature
            }
            Self::Ecdsa(pair) => pair.sign(&random, message).map_err(text)?.as_ref().to_vec(),
            Self::Ed25519(pair) => pair.sign(message).as_ref().to_vec(),
            Self::P521(key) => {
                let signature: p521::ecdsa::Signature = key.try_sign(message).map_err(text)?;
                signature.to_bytes().to_vec()
            }
        })
    }
}

impl VerifyingKey {
    fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Hmac(key) => hmac::verify(key, message, signature).is_ok(),
            Self::Ring(key) => key.verify(message, signature).is_ok(),
            Self::P521(key) => p521::ecdsa::Signature::from_slice(signature)
                .is_ok_and(|signature| key.verify(message, &signature).is_ok()),
        }
    }
}

/// Returns the bits of a public key in PEM, or of the one in a certificate: an RSAPublicKey, a point of a curve, or the
/// bytes of an Ed25519 key.
fn public_key(pem: &[u8]) -> Result<Vec<u8>, String> {
    if let Ok(der) = SubjectPublicKeyInfoDer::from_pem_slice(pem) {
        let (_, info) = SubjectPublicKeyInfo::from_der(&der).map_err(text)?;
        return Ok(info.subject_public_key.data.to_vec());
    }
    let der = CertificateDer::from_pem_slice(pem).map_err(text)?;
    let (_, certificate) = x509_parser::parse_x509_certificate(&der).map_err(text)?;
    Ok(certificate.public_key().subject_public_key.data.to_vec())
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn unusable<E: Display>(option: &str) -> impl Fn(E) -> String {
    move |error| format!("{option} cannot be used with this sign-method: {error}")
}
