import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.net.URLEncoder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.security.Provider;
import java.time.Duration;
import java.time.Instant;
import java.time.ZoneOffset;
import java.time.format.DateTimeFormatter;
import java.util.HexFormat;
import java.util.Map;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import javax.security.auth.callback.CallbackHandler;
import javax.security.sasl.SaslException;
import javax.security.sasl.SaslServer;
import javax.security.sasl.SaslServerFactory;
import org.apache.kafka.common.security.auth.SecurityProviderCreator;

/**
 * AWS_MSK_IAM on a broker of Apache Kafka, as Amazon MSK checks it: the signature, its age, the session token.
 *
 * <p>{@code -Dmsk.iam.keys=FILE}: lines of access key, secret and, for temporary keys, session token. The file is read
 * for each authentication, so keys can be replaced.
 */
public class MskIam implements SecurityProviderCreator {
  private static final String MECHANISM = "AWS_MSK_IAM";

  @Override
  public Provider getProvider() {
    return new Mechanism();
  }

  public static class Mechanism extends Provider {
    public Mechanism() {
      super("MskIam", "1.0", "AWS_MSK_IAM");
      put("SaslServerFactory." + MECHANISM, Factory.class.getName());
    }
  }

  public static class Factory implements SaslServerFactory {
    @Override
    public SaslServer createSaslServer(String mechanism, String protocol, String server, Map<String, ?> props, CallbackHandler handler) {
      return new Server();
    }

    @Override
    public String[] getMechanismNames(Map<String, ?> props) {
      return new String[] {MECHANISM};
    }
  }

  public static class Server implements SaslServer {
    private String user;

    @Override
    public byte[] evaluateResponse(byte[] response) throws SaslException {
      try {
        user = verified(new ObjectMapper().readTree(response));
        return "{\"version\":\"2020_10_22\",\"request-id\":\"1\"}".getBytes(StandardCharsets.UTF_8);
      } catch (SaslException e) {
        throw e;
      } catch (Exception e) {
        throw new SaslException("Access denied: " + e, e);
      }
    }

    /** Returns the access key that signed the request. */
    private static String verified(JsonNode given) throws Exception {
      String credential = given.get("x-amz-credential").asText();
      String date = given.get("x-amz-date").asText();
      String[] scope = credential.split("/", 5); // key, day, region, service, aws4_request
      String token = given.has("x-amz-security-token") ? given.get("x-amz-security-token").asText() : "";
      String secret = secretOf(scope[0], token);
      Instant at = Instant.from(DateTimeFormatter.ofPattern("yyyyMMdd'T'HHmmss'Z'").withZone(ZoneOffset.UTC).parse(date));
      if (Duration.between(at, Instant.now()).abs().toSeconds() > 900) throw new SaslException("Access denied: request expired");
      String query = "Action=" + encoded(given.get("action").asText())
          + "&X-Amz-Algorithm=" + encoded(given.get("x-amz-algorithm").asText())
          + "&X-Amz-Credential=" + encoded(credential)
          + "&X-Amz-Date=" + date
          + "&X-Amz-Expires=" + given.get("x-amz-expires").asText()
          + (token.isEmpty() ? "" : "&X-Amz-Security-Token=" + encoded(token))
          + "&X-Amz-SignedHeaders=" + encoded(given.get("x-amz-signedheaders").asText());
      String request = "GET\n/\n" + query + "\nhost:" + given.get("host").asText() + "\n\nhost\n" + hash("");
      String text = "AWS4-HMAC-SHA256\n" + date + "\n" + credential.substring(scope[0].length() + 1) + "\n" + hash(request);
      byte[] key = ("AWS4" + secret).getBytes(StandardCharsets.UTF_8);
      for (int i = 1; i < 5; i++) key = hmac(key, scope[i]);
      if (!HexFormat.of().formatHex(hmac(key, text)).equals(given.get("x-amz-signature").asText()))
        throw new SaslException("Access denied: the signature does not match");
      return scope[0];
    }

    private static String secretOf(String access, String token) throws Exception {
      for (String line : Files.readAllLines(Path.of(System.getProperty("msk.iam.keys")))) {
        String[] keys = line.split(" ", 3);
        if (keys[0].equals(access) && (keys.length > 2 ? keys[2] : "").equals(token)) return keys[1];
      }
      throw new SaslException("Access denied: unknown or expired keys " + access);
    }

    private static String encoded(String text) {
      return URLEncoder.encode(text, StandardCharsets.UTF_8).replace("+", "%20").replace("*", "%2A").replace("%7E", "~");
    }

    private static byte[] hmac(byte[] key, String text) throws Exception {
      Mac mac = Mac.getInstance("HmacSHA256");
      mac.init(new SecretKeySpec(key, "HmacSHA256"));
      return mac.doFinal(text.getBytes(StandardCharsets.UTF_8));
    }

    private static String hash(String text) throws Exception {
      return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(text.getBytes(StandardCharsets.UTF_8)));
    }

    @Override
    public String getMechanismName() {
      return MECHANISM;
    }

    @Override
    public boolean isComplete() {
      return user != null;
    }

    @Override
    public String getAuthorizationID() {
      return user;
    }

    @Override
    public byte[] unwrap(byte[] in, int at, int n) {
      throw new IllegalStateException();
    }

    @Override
    public byte[] wrap(byte[] out, int at, int n) {
      throw new IllegalStateException();
    }

    @Override
    public Object getNegotiatedProperty(String name) {
      return null;
    }

    @Override
    public void dispose() {}
  }
}
